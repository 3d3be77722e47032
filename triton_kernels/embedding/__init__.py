"""What a network computes from its timesteps and labels, and the padded image that it reads."""
