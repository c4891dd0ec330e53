"""The log as a command sets it up: loguru by itself would print every line of every test."""

from nri_gpu.daemon.logs import set_up_command

set_up_command()
