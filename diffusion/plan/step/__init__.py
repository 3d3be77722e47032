"""The plan of a training step: a graph whose gradients are written into one flat buffer."""
