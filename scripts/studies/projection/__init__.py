"""A cost model of compressed 3D training: fitted to measurements, then asked about a large job."""
