"""Gradient diagnostics: where gradients vanish, explode or keep their size, in time and in depth, measured on any model.

diagnosis     `unfading.diagnose`: measure a model, judge it, advise changes
measures      all measurements of one model, as plain values; verdict: the findings from them; remedy: changes worth trying
watch         gradient norms of layers and states during training
measure/      observe: record every state of a forward pass; jacobian: step Jacobians and their spectra; lag: gradient norms
              over time and layers; random_probes: estimates for large states; saturation: activations and state sizes;
              memory: when entries are written and read; lattice, lattice_step: parameter gradients of each layer and step;
              draws: lattices of random initialisations; noise: how much of a state remains after noise
equilibrium/  incremental cells: inner_path, fixed_point, inner_steps, trajectory, and their analysis
flat_start/   `unfading.flat_start`: an initialisation with a flat lattice
"""
