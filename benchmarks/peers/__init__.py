"""The comparison with sherpa-onnx on one machine: `python -m benchmarks.peers`."""
