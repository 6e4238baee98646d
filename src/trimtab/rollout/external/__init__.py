"""Engines that are processes of their own: what they share, whatever library runs in them."""
