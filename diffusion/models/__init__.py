"""The networks: modules that hold parameters and call the ops of a backend."""
