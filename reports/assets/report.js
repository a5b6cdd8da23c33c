// Draws every panel from the page's data and keeps the controls of a section in step: tree, memory budget, methods.
"use strict";
(function () {
  const page = JSON.parse(document.getElementById("report-data").textContent);
  const root = document.documentElement;
  const PRINT_WIDTH = 680; // px of an A4 page between its margins
  const PRINT_HEIGHT = 150; // px of a panel on paper: three figures a page
  const views = []; // {view, element, section}

  function embed(section, element) {
    const spec = section.specs[element.dataset.figure][Number(element.dataset.panel)];
    spec.datasets = section.data;
    for (const param of spec.params) if (param.name in section) param.value = section[param.name];
    const options = { renderer: "svg", actions: false, ast: true, tooltip: { theme: "light" } };
    element.textContent = "";
    return vegaEmbed(element, spec, options).then(function (result) {
      views.push({ view: result.view, element: element, section: section });
    });
  }

  // Shows the section's choices in charts, tables and headings.
  function show(section) {
    for (const item of views) {
      if (item.section !== section) continue;
      item.view.signal("tree", section.tree).signal("budget", section.budget).signal("hidden", section.hidden).runAsync();
    }
    for (const element of section.element.querySelectorAll("[data-for-budget], [data-for-tree]")) {
      const tree = element.dataset.forTree;
      const budget = element.dataset.forBudget;
      element.hidden =
        (tree !== undefined && tree !== section.tree) || (budget !== undefined && Number(budget) !== section.budget);
    }
    for (const element of section.element.querySelectorAll("[data-shown]")) {
      element.textContent = String(section[element.dataset.shown]);
    }
    for (const input of section.element.querySelectorAll("input[data-choice]")) {
      const value = input.dataset.choice === "budget" ? Number(input.value) : input.value;
      input.checked = value === section[input.dataset.choice];
    }
    for (const chip of section.element.querySelectorAll("button[data-method]")) {
      chip.setAttribute("aria-pressed", String(!section.hidden.includes(chip.dataset.method)));
    }
  }

  function listen(section) {
    section.element.addEventListener("change", function (event) {
      const choice = event.target.dataset.choice;
      if (!choice) return;
      section[choice] = choice === "budget" ? Number(event.target.value) : event.target.value;
      show(section);
    });
    section.element.addEventListener("click", function (event) {
      const chip = event.target.closest("button[data-method]");
      if (!chip) return;
      const name = chip.dataset.method;
      section.hidden = section.hidden.includes(name)
        ? section.hidden.filter(function (other) { return other !== name; })
        : section.hidden.concat([name]);
      show(section);
    });
  }

  // Paper has its own width: charts are laid out for it before printing and put back afterwards.
  window.addEventListener("beforeprint", function () {
    for (const item of views) {
      const panels = item.element.closest(".panels");
      const columns = Math.min(3, panels.querySelectorAll(".chart").length);
      item.height = item.view.height();
      if (columns > 1) item.view.height(PRINT_HEIGHT);
      item.view.signal("width", Math.floor((PRINT_WIDTH - 14 * (columns - 1)) / columns)).run();
    }
  });
  window.addEventListener("afterprint", function () {
    for (const item of views) if (item.height) item.view.height(item.height);
    window.dispatchEvent(new Event("resize"));
  });

  async function start() {
    for (const [anchor, section] of Object.entries(page)) {
      section.element = document.getElementById(anchor);
      section.hidden = [];
      listen(section);
      show(section);
      for (const element of section.element.querySelectorAll(".chart")) await embed(section, element);
      show(section);
    }
    root.dataset.charts = String(views.length);
  }
  start().catch(function (error) {
    root.dataset.failed = String(error);
    console.error(error);
  });
})();
