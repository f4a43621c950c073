"""Importing this module calls :func:`megatron.schedules.install`, with settings from the environment.

For frameworks that import modules by name, such as verl (``VERL_USE_EXTERNAL_MODULES``).
"""

from megatron.schedules import install

install()
