"""The forward process, its loss, and a step of the reverse process; noise drawn in registers.

    q_sample  gather_images: x_0, a batch taken from a data set that lives on the device, mirrored,
              in [-1, 1]; q_sample: x_t = sqrt(alpha_bar_t) x_0 + sqrt(1 - alpha_bar_t) epsilon
              (Ho et al. 2020, eq. 4)
    loss      |output - target|^2 / (H W C), per sample; target epsilon, x_0 or
              v = sqrt(alpha_bar_t) epsilon - sqrt(1 - alpha_bar_t) x_0 (Salimans and Ho 2022)
    step      x0 = clip(a x + b output);  x_prev = c x0 + d x + e output + sigma z;
              of a solver e times the x0 of the step before

`process` is what the first two make in registers, `chunks` how a batch is divided among programs,
`checks` what may be assumed of arguments.

Neither x_0 nor the noise is ever in memory: the loss makes both again, the noise from its counter
(`philox`), and leaves output - target to its gradient. Everything that changes from step to step
(seed, step, timesteps, row of the table) is read from device memory, so that a CUDA graph can be
replayed.
"""
