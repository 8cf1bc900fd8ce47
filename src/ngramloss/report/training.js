// Runs shown or hidden in all drawings of their part; values read off at the pointer, or with the arrow keys.

function startTraining(part) {
  const hidden = new Set();
  const boxes = [...part.querySelectorAll(".runs input")];
  const labels = boxes.map((box) => box.parentElement.textContent.trim());
  for (const box of boxes) box.addEventListener("change", () => {
    hidden[box.checked ? "delete" : "add"](+box.dataset.run);
    for (const line of part.querySelectorAll(".panel [data-run]")) {
      line.style.display = hidden.has(+line.dataset.run) ? "none" : "";
    }
  });
  for (const panel of part.querySelectorAll(".panel")) startPanel(panel, facts.panels[panel.dataset.panel], hidden, labels);
}

function startPanel(panel, { box, steps, series }, hidden, labels) {
  const drawing = panel.querySelector("svg");
  const cursor = panel.querySelector(".cursor");
  const output = panel.querySelector("output");
  const every = [...new Set(series.flatMap((item) => item.x))].sort((a, b) => a - b);
  let index = every.length - 1;

  function show() {
    const step = every[index];
    const scale = drawing.clientWidth / drawing.viewBox.baseVal.width;
    cursor.style.left = `${(box[0] + (step - steps[0]) / (steps[1] - steps[0]) * (box[2] - box[0])) * scale}px`;
    cursor.style.top = `${box[1] * scale}px`;
    cursor.style.height = `${(box[3] - box[1]) * scale}px`;
    cursor.hidden = false;
    output.replaceChildren(`step ${step}`);
    for (const item of series) {
      const point = item.x.indexOf(step);
      if (point < 0 || hidden.has(item.run)) continue;
      output.append(element("i", { class: `series-${item.run % 7}`, title: labels[item.run] }), `${item.part ? item.part + " " : ""}${item.y[point]}`);
    }
  }

  panel.addEventListener("pointermove", (event) => {
    const frame = drawing.getBoundingClientRect();
    const across = (event.clientX - frame.left) / frame.width * drawing.viewBox.baseVal.width;
    const step = steps[0] + (across - box[0]) / (box[2] - box[0]) * (steps[1] - steps[0]);
    index = every.reduce((best, item, number) => Math.abs(item - step) < Math.abs(every[best] - step) ? number : best, 0);
    show();
  });
  const leave = () => { cursor.hidden = true; output.replaceChildren(); };
  panel.addEventListener("pointerleave", leave);
  panel.addEventListener("blur", leave);
  panel.addEventListener("focus", () => { if (panel.matches(":focus-visible")) show(); });
  panel.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    event.stopPropagation();
    index = Math.max(0, Math.min(every.length - 1, index + move));
    show();
  });
}

document.querySelectorAll("[data-training]").forEach(startTraining);
