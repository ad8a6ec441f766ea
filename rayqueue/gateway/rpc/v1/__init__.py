"""Stubs made from proto/ by scripts/protos. Do not edit."""
