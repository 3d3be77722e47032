"""2x2 means and nearest upsampling, where no convolution does them."""
