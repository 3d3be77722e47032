"""Compile-only cases of triton_kernels.optimizer.adamw."""

from .compile_only import WITHOUT_PRODUCTS

CHIPS = WITHOUT_PRODUCTS

COMPILE_CASES = [
    {
        "name": "square_sums",
        "kernel": "triton_kernels.optimizer.adamw:_square_sums_kernel",
        "signature": {
            "grad_ptr": "*fp32",
            "sums_ptr": "*fp32",
            "size": "i32",
            "first": "i32",
            "count": "i32",
            "chunks": "i32",
        },
        "constexprs": {
            **{"norm_ptr": None, "counter_ptr": None},
            **{"TURNS": 4, "BLOCK": 4096, "CHUNKS": 2048},
        },
        "options": {"num_warps": 8},
    },
    {
        "name": "grad_norm",
        "kernel": "triton_kernels.optimizer.adamw:_square_sums_kernel",
        "signature": {
            "grad_ptr": "*fp32",
            "sums_ptr": "*fp32",
            "norm_ptr": "*fp32",
            "counter_ptr": "*i32",
            "size": "i32",
            "first": "i32",
            "count": "i32",
            "chunks": "i32",
        },
        "constexprs": {"TURNS": 4, "BLOCK": 4096, "CHUNKS": 2048},
        "options": {"num_warps": 8},
    },
    {
        "name": "grad_norm_of_one",  # Triton makes a constant of every integer that is 1
        "kernel": "triton_kernels.optimizer.adamw:_square_sums_kernel",
        "signature": {
            "grad_ptr": "*fp32",
            "sums_ptr": "*fp32",
            "norm_ptr": "*fp32",
            "counter_ptr": "*i32",
            "first": "i32",
        },
        "constexprs": {
            **{"size": 1, "count": 1, "chunks": 1},
            **{"TURNS": 1, "BLOCK": 4096, "CHUNKS": 1},
        },
        "options": {"num_warps": 8},
        "expect": {"arches": [90]},
    },
    {
        "name": "adamw",
        "kernel": "triton_kernels.optimizer.adamw:_adamw_kernel",
        "signature": {
            "param_ptr": "*fp32",
            "grad_ptr": "*fp32",
            "exp_avg_ptr": "*fp32",
            "exp_avg_sq_ptr": "*fp32",
            "ema_ptr": "*fp32",
            "shadow_ptr": "*bf16",
            "norm_ptr": "*fp32",
            "hyper_ptr": "*fp64",
            "skipped_ptr": "*i32",
            "size": "i32",
        },
        "constexprs": {"BLOCK": 1024},
        "options": {"num_warps": 8},
    },
]
