"""The ops of nodes: what each computes, by the pass that makes such nodes."""

# what a traced network is made of
FORWARD = {
    "conv": "x [N, H, W, CI] * weight [CO, CI, R, S] + bias; stride, padding (y0, y1, x0, x1)",
    "linear": "x [..., CI] weight [CO, CI]^T + bias: over images, a convolution with 1x1 filters",
    "group_norm": "act(((x - mean) rstd weight + bias) (1 + scale) + shift), x [N, ..., C]",
    "channel_norm": "act((factor norm(x) weight + bias) (1 + scale) + shift), over the last axis, "
    "or, `of_filters`, over all but the first; fused, + residual",
    "act": "activation(x)",
    "gated": "h act(g), where h and g are the halves of x [..., 2C], and `gate` says which is g",
    "attention": "softmax(q k^T scale) v of each head, of `PARTS`, over keys of a mask; its state",
    "linear_attention": "scale softmax(q) (softmax(k)^T v), q over channels, k over positions",
    "cat": "x0, x1, ... side by side along an axis",
    "add": "a + b, where b may have length 1 along axes of a",
    "mul": "a b, likewise",
    "affine": "scale x + offset, both numbers",
    "upsample": "each pixel becomes a block of `factor` pixels",
    "fir": "channels filtered by `taps`: `up` with zeros between, `down`, pixels before: `start`, "
    "which are zeros or, `border`, mirrored ones, or folded: the gradient of these",
    "avg_pool": "means over blocks of `window` pixels; fused, their partials",
    "slice": "start to stop along an axis",
    "pad": "zeros before and behind, along each axis",
    "dropout": "x / (1 - p) where a draw says so, else 0; by `rng` and `layer`, or PyTorch's state",
    "draw": "numbers of PyTorch's generator: `target`, of x0, x1, ...; on the device of `beside`",
    "cast": "x in another dtype",
    "embedding": "rows of weight, by index; row `unchanged`, if not -1, has no gradient",
    "reshape": "the same memory under another shape",
    "detach": "x, to which no gradient is sent",
    "rewritten": "x, which is written over a parameter: the gradient is that of the parameter, of",
    "layout": "a copy in another order: `pieces` are (size, stride) in x, from `offset` on",
    "arith": "a function that PyTorch has the kernel of, as of timesteps and labels: `target`",
}
# what a group norm becomes, so that its parts can be joined to what is around it: see `norms`
NORM = {
    "moments": "partials [N, K, 2, C] of x: sums, and squares about the mean, of K tiles of pixels",
    "norm_table": "table [N, 4, C] (mean, rstd, g, b) from the partials of one or two tensors",
    "norm_apply": "act((x - mean) rstd g + b) of one tensor, or of two side by side; "
    "after_scale act(...) + after_shift + after_add, where it has these",
}
# what backward is made of, beside the above
BACKWARD = {
    "conv_dx": "the gradient of x in conv; also a transposed convolution, of x as `dy`",
    "conv_dw": "the gradient of weight in conv",
    "linear_dx": "the gradient of x in linear",
    "linear_dw": "the gradient of weight in linear",
    "norm_act_grad": "dz = da act'(z), and its partials: sums of dz and of dz xhat; times "
    "after_scale, and the gradients of that and of after_shift",
    "norm_grad_table": "coeff [N, 3, C] (p, q, r), and the gradients of weight, bias, scale, shift",
    "norm_dx": "p dz + q x + r, of one tensor or two; fused, that of the first times a factor",
    "channel_norm_grad": "the gradients of what channel_norm reads, that of x + add; rows of it, "
    "and sums, which are rows of those of bias and weight",
    "act_grad": "dy act'(x)",
    "gated_grad": "the gradient of x in gated",
    "attention_grad": "the gradients of the parts of attention",
    "linear_attention_grad": "the gradients of the parts and of the memory of linear_attention",
    "sum_pool": "sums over blocks of `window` pixels",
    "sum": "sums over axes, of which each stays with length 1 or not",
    "embedding_grad": "rows of dy added up by index",
    "layout_grad": "what layout read, put back where it was",
    "arith_grad": "the gradients of arguments of arith, of which `of` are the numbers",
}
# what fusing makes of these: see `fuse`
FUSED = {
    "casts": "x0, x1, ... in another dtype, or `parts` of them side by side: parameters of a call",
    "bias_grads": "sums of rows0, rows1, ...: of each result its rows and first column, as `parts`",
    "rounded": "x0, x1, ... to TF32, as y0, y1, ...: parameters, once in a call",
    "weight_grads": "conv_dw or linear_dw of x0, dy0, x1, dy1, ... of one size, as y0, y1, ...",
    "elementwise": "`steps` of each element of x0, x1, ..., and what is wanted of them: `places`",
    "columns": "channels start to stop, where they lie: rows are further apart",
    "pad_channels": "zeros behind the channels, up to `width`, in another dtype",
    "conv_fused": "factor (conv or linear + emb [N, C] + residual + extra columns^T); its partials",
    "norm": "norm_table and norm_apply, and dropout if there is an rng; the table, and words of it",
    "conv_input_grad": "conv_dx times act'(z), and its partials",
    "skip_dx": "norm_dx + dy weight, the input gradient of a 1x1 convolution beside the norm",
}
# what a training step makes of it, whose gradients go into one flat buffer: see `step`
STEP = {
    "norm_of_upsampled": "norm of upsample(x0) beside x1, the table of x1, and upsample(x0)",
    "conv_down": "a 3x3 conv of stride 2",
    "conv_down_dx": "the gradient of its x, + add",
    "avg_pool_grad": "a quarter of dy for each of 2x2 pixels, + add; and rows of it",
    "norm_backward": "norm_grad_table and norm_dx",
    "skip_backward": "norm_grad_table and skip_dx",
    "conv_upsampled_dx": "conv_input_grad of conv_upsampled: of the small image, and of x1",
    "conv_of_upsampled_dx": "the gradient of x in conv_of_upsampled",
    "row_sums": "sums of x over pixels, of any number of images",
    "bias_grad": "sums of rows",
    "accumulate": "x, added to what is there",
}
# what a forward pass becomes where nothing runs beside it: see `join`
JOINED = {
    "conv_few": "conv_fused, by whichever kernel is quickest alone",
    "conv_split": "parts of conv and the 1x1 terms, that have to be added up",
    "sum_parts": "factor (these + bias + emb + residual), and partials of it",
    "resample_parts": "the same, and it upsampled or its 2x2 means",
    "norm_single_cta": "norm without partials, of x, of parts, or of 2x2 means",
    "norm_of_sums": "norm without a table",
    "norm_upsampled": "the same of upsample(x0) beside x1, and perhaps upsample(x0)",
    "conv_norm": "conv_fused, and the norm of it, beside another tensor perhaps",
    "norm_conv": "conv_fused of norm(x)",
    "upsampled_filters": "sums of taps that multiply a small image, and filters of the others",
    "conv_of_upsampled": "conv(upsample(x)), on x",
    "conv_upsampled": "conv(a), of which the first channels were upsampled",
    "projected_attention": "attention of x [Wq, Wk, Wv], or of norm(x)",
}
# what it becomes where images are rows of a few positions, see `join.stages`; sums are in parts,
# and an activation is what no launch has made: film(mish(norm(sums))) + residual
STAGED = {
    "film_weights": "linear layers of one tensor, side by side, cut by the parts of its concat",
    "project": "mish(z) weight^T + bias",
    "stem_weights": "filters [CO, CI, 1, S] as [CI, S, CO]",
    "stage_weights": "filters, and 1x1 ones beside them, in the order in which programs read them",
    "stage": "sums of the convolution of an activation, and of a 1x1 one; and the activation",
    "head": "a 1x1 convolution of an activation",
}
# what attention is of: qkv [N, ..., 3C]; or q [N, ..., C] and kv [N, ..., 2C], or k and v, of as
# many positions or of others
PARTS = ("qkv", "q", "kv", "k", "v")
# of linear attention, in front of the positions of the image: keys and values of all samples [M, C]
MEMORY = ("memory_k", "memory_v")
WEIGHT_GRADS = ("conv_dw", "linear_dw", "weight_grads")
# what norm_grad_table makes that are sums over images, side by side in its rows; and
# channel_norm_grad, of pixels that are all treated alike
SUMS_OF_NORM = ("weight", "bias", "input_bias")
SUMS_OF_CHANNEL_NORM = ("bias", "weight")
# what multiplies, and is added to, a norm's result behind its activation: a row for each image
AFTER = ("after_scale", "after_shift")
FREE = ("reshape", "columns", "detach", "rewritten")  # which make no memory
OPS = FORWARD | NORM | BACKWARD | FUSED | STEP | JOINED | STAGED
