"""The environment of the chaos suite: what is said depends on seed and replies alone, so that the oracle can play each episode again.

world      the episodes, and which of them go wrong, where          deeds      how
plugin     the class that a child of the environment service loads   package    its installation
"""
