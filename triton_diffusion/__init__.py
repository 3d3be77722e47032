"""The command line: `triton-diffusion NAME`, train.py, sample.py and the scripts of tools/.

The one package that knows Hydra: it turns the configuration into keyword arguments for `diffusion`.
"""
