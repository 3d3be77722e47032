"""The error that means: the user gave something wrong."""


class ConfigError(ValueError):
    """A setting, path or file is wrong. The message is one line: the value that was wrong and the
    values that are right. Entry points print it and exit with code 2."""
