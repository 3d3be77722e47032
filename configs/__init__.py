"""The YAML configuration, and the door between Hydra and the project."""
