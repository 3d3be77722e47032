"""The public `conv2d` by Hopper's kernels, without terms beside a bias."""
