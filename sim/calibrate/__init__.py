"""Measured kernel times in, a calibration with its errors out. Needs the extra [calibrate]."""
