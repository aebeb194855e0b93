"""Sphinx extensions: equations without scripts, pages whose code runs when they are built."""
