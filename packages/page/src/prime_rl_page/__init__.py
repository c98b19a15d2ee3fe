"""`page`: shows live, finished and copied runs in a browser. It reads only the run directory."""
