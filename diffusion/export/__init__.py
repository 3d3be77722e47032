"""A trained network for other programs: ONNX, torch.export, TensorRT, others' checkpoints."""
