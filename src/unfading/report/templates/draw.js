// Draw every figure; show the reader a sentence where that fails, and log the rest to the console.
for (const plot of document.querySelectorAll("[data-figure]")) {
  const spec = JSON.parse(document.getElementById(plot.dataset.figure).textContent);
  const actions = { export: true, source: false, compiled: false, editor: false };
  vegaEmbed(plot, spec, { renderer: "svg", actions }).catch((error) => {
    plot.textContent = "This figure could not be drawn: " + error.message;
    console.error(error);
  });
}
