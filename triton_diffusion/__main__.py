"""As the console command: python -m triton_diffusion NAME ..., for torchrun -m."""

from .commands import main

if __name__ == "__main__":
    main()
