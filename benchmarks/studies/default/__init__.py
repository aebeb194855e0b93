"""Comparison of methods on several data sets, with one harness for all contenders."""
