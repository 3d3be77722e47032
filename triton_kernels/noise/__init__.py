"""Random numbers that are a function of a counter: noise, timesteps, flips, dropout masks."""
