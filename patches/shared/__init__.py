"""What the seams of several upstream packages share. No seam is here."""
