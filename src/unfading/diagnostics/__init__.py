"""The gradient microscope: where gradients vanish, explode or survive, in time and in depth, measured on a user's own model.

observe       one forward pass in which every state of every layer can be reached
jacobian      dh_t/dh_{t-1} and dh_t/dx_t: singular values, spectral radius
lag           ||dh_T/dh_t|| and ||dL/dh_t|| over time and layers
probe         the same for states too large to be written out: estimates that say how wrong they may be
saturation    gates that saturate, ReLUs that are dead, sizes of states
memory        which entries of a memory are written and read, and when
equilibrium   of incremental cells: how far the inner steps come, how fast, and what the theorems ask for
trajectory    states in the plane; noise: what a state keeps when nothing comes, or noise
lattice       the gradient of the parameters that each layer used at each step; point: one of its points; draws: over
              random starts; flatness: in numbers; flat_start: a start that makes it flat; knobs: what it turns
sampled       lattice and equilibria of a diagnosed model, at as many steps as a few seconds allow
watch         gradients of layers and states while a model is trained
verdict       all of it in words; remedy measures what is worth trying
"""
