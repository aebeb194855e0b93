"""What the site needs and no package offers: equations without scripts, pages whose code runs when they are built."""
