"""From trained weights to a bundle: ONNX graphs (optimum), quantisation, parity, assembly. `ciar-train export`."""

from training.export.stage import ExportSettings, run_export

__all__ = ["ExportSettings", "run_export"]
