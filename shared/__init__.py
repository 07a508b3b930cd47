"""What the device and the cloud must agree on: geometry, warp, noise, transcript, bundle, methods and errors.

Needs numpy and array-api-compat only, so that either side, and any tool, can import it.
"""
