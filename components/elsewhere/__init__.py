"""Settings of other systems (Trinity-RFT, veRL, torchtune) as ours: `leeway import`."""
