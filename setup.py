"""The one setting of the build that pyproject.toml has no place for; everything else is there."""

from setuptools import setup

# An editable install puts this checkout on sys.path by a .pth file, so that `megatron` stays an ordinary
# namespace over two folders: ours and the installed megatron-core's. The other way, an import hook, is
# invisible to tools that look for files on the path, such as type checkers and import-linter.
setup(options={"editable_wheel": {"mode": "compat"}})
