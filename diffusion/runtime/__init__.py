"""What a process runs on: backend, processors, other processes, CUDA graphs, signals."""
