"use strict";
// Tables sort by the column whose heading is pressed; a cell's data-v is its value, where that is not its text.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  table.tHead.rows[0].querySelectorAll("th").forEach((heading, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => {
      const down = heading.getAttribute("aria-sort") !== "descending";
      for (const other of table.querySelectorAll("thead th")) other.removeAttribute("aria-sort");
      heading.setAttribute("aria-sort", down ? "descending" : "ascending");
      const value = (row) => row.cells[column].dataset.v ?? row.cells[column].textContent;
      const rows = [...body.rows].sort((one, other) => {
        const [left, right] = [value(one), value(other)];
        const numbers = left !== "" && right !== "" && !isNaN(left) && !isNaN(right);
        return numbers ? left - right : String(left).localeCompare(String(right));
      });
      body.append(...(down ? rows.reverse() : rows));
    });
  });
}
// The passage is shaded by the layer that is chosen.
const passage = document.querySelector(".passage");
const choice = document.querySelector("label.layer select");
if (passage && choice) {
  const layers = JSON.parse(passage.dataset.values);
  const show = () => {
    const values = layers[choice.value];
    const most = Math.max(...values, 1e-9);
    [...passage.children].forEach((token, index) => {
      token.style.setProperty("--v", (values[index] / most).toFixed(3));
      token.title = `${values[index].toLocaleString("en")} ${passage.dataset.name}`;
    });
    document.querySelector(".scale-top").textContent = most.toLocaleString("en", { maximumFractionDigits: 1 });
  };
  choice.addEventListener("change", show);
  choice.closest("label").hidden = false;
}
