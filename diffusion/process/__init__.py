"""The diffusion process: noise schedules, prediction targets, losses."""
