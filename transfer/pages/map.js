"use strict";
// Thumbnails on a map of features: of the point under the pointer, or by arrow keys.
for (const plane of document.querySelectorAll(".plane")) {
  const { tile, columns } = plane.dataset;
  const tip = plane.querySelector(".tip");
  const image = tip.querySelector("img");
  const points = [...plane.querySelectorAll("circle")];
  const width = Number(tile), scale = 80 / width;
  let chosen = -1;
  const choose = (number) => {
    if (chosen >= 0) points[chosen].classList.remove("chosen");
    chosen = number;
    tip.hidden = number < 0;
    if (number < 0) return;
    const point = points[number];
    const at = Number(point.dataset.i);
    point.classList.add("chosen");
    const x = (at % columns) * width, y = Math.floor(at / columns) * width;
    image.style.transform = `scale(${scale}) translate(${-x}px, ${-y}px)`;
    tip.querySelector(".name").textContent = point.parentNode.dataset.name;
    const box = plane.getBoundingClientRect(), dot = point.getBoundingClientRect();
    const left = dot.left - box.left + 14, top = dot.top - box.top + 14;
    tip.style.left = `${Math.max(0, Math.min(left, box.width - tip.offsetWidth - 4))}px`;
    tip.style.top = `${Math.max(0, top + tip.offsetHeight > box.height ? top - tip.offsetHeight - 22 : top)}px`;
  };
  plane.addEventListener("pointermove", (event) => {
    const number = points.indexOf(event.target);
    if (number !== chosen) choose(number);
  });
  plane.addEventListener("pointerleave", () => choose(-1));
  plane.addEventListener("blur", () => choose(-1));
  plane.tabIndex = 0;
  plane.setAttribute("role", "group");
  plane.setAttribute("aria-label", "Map of features: arrow keys go from image to image");
  tip.setAttribute("aria-live", "polite");
  plane.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") choose(-1);
    if (!step) return;
    event.preventDefault();
    choose((chosen + step + points.length) % points.length);
  });
}
