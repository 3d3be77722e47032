"""GPUs that tests choose kernels for; none of them need be there."""

from triton_kernels.runtime.device import Device

HOPPER = Device(tma=True, num_sms=132, shared_memory=232_448, hopper=True, arch=90)
