"""Drawing samples: samplers, guidance, chains as CUDA graphs."""
