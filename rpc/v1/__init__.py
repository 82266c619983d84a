"""Version 1 of the control plane on the wire. Generated from control.proto by `python -m onesided.rpc.generate`."""
