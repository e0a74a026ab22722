// Click, Enter or Space on a heading sorts by it; again turns the order round. Cells without a value stay last.
for (const table of document.querySelectorAll("table[data-sortable]")) {
  const headings = [...table.tHead.rows[0].cells];
  const body = table.tBodies[0];
  const compare = (a, b) => {
    const x = Number(a), y = Number(b);
    return Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b, undefined, { numeric: true }) : x - y;
  };
  headings.forEach((heading, column) => {
    heading.querySelector("button").addEventListener("click", () => {
      const before = heading.getAttribute("aria-sort");
      const first = heading.classList.contains("n") ? "descending" : "ascending";
      const second = first === "ascending" ? "descending" : "ascending";
      const order = before === first ? second : first;
      for (const other of headings) other.setAttribute("aria-sort", "none");
      heading.setAttribute("aria-sort", order);
      const sign = order === "ascending" ? 1 : -1;
      const key = (row) => row.cells[column].dataset.key;
      const rows = [...body.rows].sort((a, b) => {
        const x = key(a), y = key(b);
        if (x === "" || y === "") return (x === "") - (y === "");
        return sign * compare(x, y);
      });
      body.append(...rows);
    });
  });
}
