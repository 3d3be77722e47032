"""Other people's weights: of guided-diffusion, unet.cu and diffusers read and written, of
diffusion_policy read."""
