"""Checks of a cluster before training: versions, GPUs, network, disks and memory."""
