"""The ways in which bytes move, behind one seam."""
