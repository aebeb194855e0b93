"""Comparison of methods on several data sets: one harness for all contenders."""
