"""Other people's weights, read and written: guided-diffusion, unet.cu, diffusers."""
