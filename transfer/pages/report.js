// Tables are complete without this script, which sorts and filters them.
const numberOf = (unit, column) => {
  const rows = unit.tagName === "TBODY" ? [...unit.rows] : [unit];
  for (const row of rows) {
    const cell = row.cells[column];
    const value = cell ? parseFloat(cell.textContent) : NaN;
    if (!Number.isNaN(value)) return value;
  }
  return NaN;
};
const compare = (column, sign) => (one, other) => {
  if (column === 0) {
    const [a, b] = [one, other].map((unit) => unit.querySelector("th").textContent);
    return -sign * a.localeCompare(b, "en", { numeric: true });
  }
  const a = numberOf(one, column), b = numberOf(other, column);
  if (Number.isNaN(a) || Number.isNaN(b)) return Number.isNaN(a) - Number.isNaN(b);
  return sign * (a - b);
};
for (const table of document.querySelectorAll("table.sortable")) {
  const bodies = [...table.tBodies];
  const units = bodies.length > 1 ? bodies : [...bodies[0].rows];
  if (units.length < 2) continue;
  const heads = [...table.querySelectorAll("thead th[data-column]")];
  for (const head of heads) {
    const label = head.querySelector(".label");
    const button = document.createElement("button");
    button.type = "button";
    button.className = "label";
    button.append(...label.childNodes);
    button.title = "sort by this column";
    label.replaceWith(button);
    button.addEventListener("click", () => {
      const next = { none: "descending", descending: "ascending", ascending: "none" };
      const order = next[head.getAttribute("aria-sort") || "none"];
      heads.forEach((each) => each.removeAttribute("aria-sort"));
      if (order !== "none") head.setAttribute("aria-sort", order);
      const sign = order === "descending" ? -1 : 1;
      const sorted = order === "none" ? units : [...units].sort(compare(Number(head.dataset.column), sign));
      const place = units[0].parentNode;
      place.append(...sorted);
    });
  }
}
for (const controls of document.querySelectorAll(".controls")) {
  const table = document.getElementById(controls.dataset.table);
  const rows = [...table.tBodies[0].rows];
  const words = controls.querySelector("input");
  const kinds = [...controls.querySelectorAll("button[data-kind]")];
  const sets = [...controls.querySelectorAll("button[data-set]")];
  const shown = controls.querySelector("output");
  const pressed = (buttons) => buttons.filter((each) => each.getAttribute("aria-pressed") === "true");
  const filter = () => {
    const wanted = pressed(kinds).map((each) => each.dataset.kind);
    const parts = words.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const row of rows) {
      const head = row.cells[0], text = `${head.textContent} ${head.title}`.toLowerCase();
      const fits = (!wanted.length || wanted.includes(row.dataset.kind)) && parts.every((part) => text.includes(part));
      row.hidden = !fits;
      count += fits;
    }
    shown.textContent = count === rows.length ? `${count} networks` : `${count} of ${rows.length} networks`;
  };
  const choose = () => {
    const wanted = pressed(sets).map((each) => each.dataset.set);
    for (const cell of table.querySelectorAll("[data-set]")) cell.hidden = wanted.length > 0 && !wanted.includes(cell.dataset.set);
  };
  words.addEventListener("input", filter);
  for (const button of [...kinds, ...sets]) {
    button.addEventListener("click", () => {
      button.setAttribute("aria-pressed", button.getAttribute("aria-pressed") !== "true");
      if (button.dataset.kind) filter(); else choose();
    });
  }
  filter();
  controls.hidden = rows.length < 2 && sets.length < 2;
}
// A link into a folded section opens it.
const unfold = () => {
  const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (target) for (let each = target; each; each = each.parentElement) if (each.tagName === "DETAILS") each.open = true;
};
addEventListener("hashchange", unfold);
unfold();
