"""Compile-only cases of triton_kernels.noise.draw and triton_kernels.denoise: a batch of 64x64x3
images."""

from .compile_only import WITHOUT_PRODUCTS

CHIPS = WITHOUT_PRODUCTS

_BATCH = {
    "images_ptr": "*u8",
    "index_ptr": "*i64",
    "flip_ptr": "*i1",
    "t_ptr": "*i64",
    "table_ptr": "*fp32",
    "rng_ptr": "*i64",
    "first": "i32",
    "elements": "i32",
    "chunks": "i32",
}
_SIZES = {"W": 64, "C": 3}
_LOSS = {**_SIZES, "CO": 3, "PREDICTION": "v_prediction"}
_STEP = {"first_ptr": None, "memory_ptr": None, "C": 3, "CLIP": True, "BLOCK": 256}

COMPILE_CASES = [
    {
        "name": "normal",
        "kernel": "triton_kernels.noise.draw:_normal_kernel",
        "signature": {
            "out_ptr": "*fp32",
            "rng_ptr": "*i64",
            "first": "i32",
            "elements": "i32",
            "chunks": "i32",
        },
        "constexprs": {"STREAM": 2, "BLOCK": 256},
        "options": {"num_warps": 4},
        "multiples": ["elements"],
    },
    {
        "name": "draw_timesteps",
        "kernel": "triton_kernels.noise.draw:_draw_timesteps_kernel",
        "signature": {
            "out_ptr": "*i64",
            "rng_ptr": "*i64",
            "first": "i32",
            "n": "i32",
            "num_timesteps": "i32",
        },
        "constexprs": {"STREAM": 0, "BLOCK": 256},
        "options": {"num_warps": 4},
        "expect": {"arches": [90]},
    },
    {
        "name": "draw_flips",
        "kernel": "triton_kernels.noise.draw:_draw_flips_kernel",
        "signature": {"out_ptr": "*i1", "rng_ptr": "*i64", "first": "i64", "n": "i32"},
        "constexprs": {"STREAM": 1, "BLOCK": 256},
        "options": {"num_warps": 4},
        "expect": {"arches": [90]},
    },
    {
        "name": "q_sample",
        "kernel": "triton_kernels.denoise.q_sample:_q_sample_kernel",
        "signature": {**_BATCH, "x_ptr": "*bf16"},
        "constexprs": {**_SIZES, "BLOCK": 256},
        "options": {"num_warps": 4},
        "multiples": ["elements"],
    },
    {
        "name": "gather_images",
        "kernel": "triton_kernels.denoise.q_sample:_q_sample_kernel",
        "signature": {
            "images_ptr": "*fp32",
            "x_ptr": "*fp32",
            "first": "i32",
            "elements": "i32",
            "chunks": "i32",
        },
        "constexprs": {
            **_SIZES,
            **dict.fromkeys(("index_ptr", "flip_ptr", "t_ptr", "table_ptr", "rng_ptr")),
            "BLOCK": 256,
        },
        "options": {"num_warps": 4},
        "expect": {"arches": [90]},
    },
    {
        "name": "denoise_loss_fwd",
        "kernel": "triton_kernels.denoise.loss_kernels:denoise_loss_fwd_kernel",
        "signature": {
            **_BATCH,
            "output_ptr": "*bf16",
            "loss_ptr": "*fp32",
            "slots_ptr": "*i32",
            "difference_ptr": "*fp32",
        },
        "constexprs": {**_LOSS, "BLOCK": 1024, "BLOCKS": 1, "SLOTS": 4, "QUADS": False},
        "options": {"num_warps": 8},
        "multiples": ["elements"],
    },
    {
        "name": "denoise_loss_fwd_of_whole_samples",
        "kernel": "triton_kernels.denoise.loss_kernels:denoise_loss_fwd_kernel",
        "signature": {
            **{k: v for k, v in _BATCH.items() if k != "chunks"},
            "output_ptr": "*bf16",
            "loss_ptr": "*fp32",
            "difference_ptr": "*fp32",
        },
        "constexprs": {
            **_LOSS,
            **{"slots_ptr": None, "chunks": 1},
            **{"BLOCK": 1024, "BLOCKS": 3, "SLOTS": 2, "QUADS": False},
        },
        "options": {"num_warps": 8},
        "multiples": ["elements"],
        "expect": {"arches": [90]},
    },
    {
        "name": "denoise_loss_bwd",
        "kernel": "triton_kernels.denoise.loss_kernels:denoise_loss_bwd_kernel",
        "signature": {
            "dloss_ptr": "*fp32",
            "stride_dn": "i32",
            "difference_ptr": "*fp32",
            "doutput_ptr": "*bf16",
            "elements": "i32",
            "chunks": "i32",
        },
        "constexprs": {"C": 3, "CO": 6, "BLOCK": 2048},
        "options": {"num_warps": 4},
        "multiples": ["elements"],
    },
    {
        "name": "denoise_loss_bwd_one_element",  # Triton makes a constant of an integer that is 1
        "kernel": "triton_kernels.denoise.loss_kernels:denoise_loss_bwd_kernel",
        "signature": {"dloss_ptr": "*fp32", "difference_ptr": "*fp32", "doutput_ptr": "*fp16"},
        "constexprs": {"stride_dn": 1, "elements": 1, "chunks": 1, "C": 1, "CO": 2, "BLOCK": 2048},
        "options": {"num_warps": 4},
        "expect": {"arches": [90]},
    },
    {
        "name": "denoise_step",
        "kernel": "triton_kernels.denoise.step:_denoise_step_kernel",
        "signature": {
            "x_ptr": "*fp32",
            "output_ptr": "*bf16",
            "table_ptr": "*fp32",
            "row_ptr": "*i64",
            "rng_ptr": "*i64",
            "x_prev_ptr": "*fp32",
            "first": "i32",
            "clip": "fp32",
            "elements": "i32",
            "chunks": "i32",
        },
        "constexprs": {**_STEP, "CO": 6, "PITCH": 16},
        "options": {"num_warps": 4},
        "multiples": ["elements"],
    },
    {
        "name": "denoise_step_of_a_solver_in_a_graph",
        "kernel": "triton_kernels.denoise.step:_denoise_step_kernel",
        "signature": {
            "x_ptr": "*fp32",
            "output_ptr": "*bf16",
            "table_ptr": "*fp32",
            "row_ptr": "*i64",
            "rng_ptr": "*i64",
            "first_ptr": "*i64",
            "memory_ptr": "*fp32",
            "x_prev_ptr": "*fp32",
            "first": "i32",
            "clip": "fp32",
            "elements": "i32",
            "chunks": "i32",
        },
        "constexprs": {"C": 3, "CO": 3, "PITCH": 3, "CLIP": True, "BLOCK": 256},
        "options": {"num_warps": 4},
        "multiples": ["elements"],
        "expect": {"arches": [90]},
    },
]
