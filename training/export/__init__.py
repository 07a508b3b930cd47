"""From trained weights to a bundle: ONNX graphs (optimum), quantisation, parity, assembly."""
