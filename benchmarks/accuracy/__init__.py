"""Estimates of iteration times held against measurements that others published."""
