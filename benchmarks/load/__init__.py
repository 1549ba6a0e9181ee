"""Paced real-time streams against a server: `python -m benchmarks.load --help`.

Needs numpy, grpcio, protobuf and the generated modules of tritonclient.grpc, nothing else.
"""
