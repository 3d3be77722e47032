"""The 1-D network of a few samples, where reading weights is the work: one launch a layer, or two.

`conv1d` has the stages and launches `conv1d_kernels`; `activation` (a stage's input, made where it
is needed) and `taps` (how weights lie) are what those are made of. `operands` and `weights` are
what callers give.

`whole` multiplies on Hopper, with `whole_kernel`, where a layer is two launches: of 4 samples or
more, or of fewer where convolutions are large on average (`diffusion.plan.join.stages`). It fetches
whatever it reads whole, once; `conv1d` fetches the activations for each tap. `reference` says it in
PyTorch.
"""
