// Filters, search and sorting. Without it the page shows everything; filters stand in the address, so that a view can be sent.
(function () {
  "use strict";
  var form = document.getElementById("filters");
  var selects = form ? Array.prototype.slice.call(form.querySelectorAll("select")) : [];
  var searches = Array.prototype.slice.call(document.querySelectorAll("input[type=search]"));
  var tables = Array.prototype.slice.call(document.querySelectorAll("table"));
  var figures = Array.prototype.slice.call(document.querySelectorAll("figure"));
  var groups = Array.prototype.slice.call(document.querySelectorAll(".group"));

  function headers(table) {
    return Array.prototype.slice.call(table.tHead.rows[0].cells);
  }

  function chosen() {
    return selects.filter(function (select) { return select.selectedIndex > 0; });
  }

  // what is typed: each word must be in some cell of the row
  function words(table) {
    var input = searches.filter(function (each) { return each.getAttribute("data-for") === table.id; })[0];
    return input ? input.value.toLowerCase().split(/\s+/).filter(Boolean) : [];
  }

  function textOf(row) {
    if (row.searched === undefined) {
      row.searched = Array.prototype.map.call(row.cells, function (cell) { return cell.textContent; })
        .join("\n").toLowerCase();
    }
    return row.searched;
  }

  function apply() {
    var wanted = chosen();
    tables.forEach(function (table) {
      var tests = [], shown = 0, rows = table.tBodies[0].rows, typed = words(table);
      headers(table).forEach(function (header, index) {
        wanted.forEach(function (select) {
          if (header.getAttribute("data-filter") === select.name) tests.push([index, select.value]);
        });
      });
      for (var i = 0; i < rows.length; i++) {
        rows[i].hidden = tests.some(function (test) { return rows[i].cells[test[0]].textContent !== test[1]; }) ||
          typed.some(function (word) { return textOf(rows[i]).indexOf(word) < 0; });
        shown += rows[i].hidden ? 0 : 1;
      }
      document.getElementById(table.id + "-count").textContent =
        (shown === rows.length ? "" : shown + " of ") + rows.length + (rows.length === 1 ? " row" : " rows");
    });
    figures.forEach(function (figure) {
      figure.hidden = wanted.some(function (select) {
        var value = figure.getAttribute("data-of-" + select.name.toLowerCase());
        return value !== null && value !== select.value;
      });
    });
    groups.forEach(function (group) { group.hidden = !group.querySelector("figure:not([hidden])"); });
  }

  function remember() {
    var parts = new URLSearchParams();
    chosen().forEach(function (select) { parts.set(select.name, select.value); });
    try {
      history.replaceState(null, "", "#" + parts.toString());
    } catch (error) {
      // a page inside of another may have no address of its own
    }
  }

  // a link to a part of the page
  function visit(name) {
    var part = document.getElementById(name), details = part && part.querySelector("details");
    if (details) details.open = true;
  }

  function recall() {
    if (location.hash && location.hash.indexOf("=") < 0) return visit(location.hash.slice(1));
    var parts = new URLSearchParams(location.hash.slice(1));
    selects.forEach(function (select) {
      select.selectedIndex = 0;
      for (var i = 1; i < select.options.length; i++) {
        if (select.options[i].value === parts.get(select.name)) select.selectedIndex = i;
      }
    });
    apply();
    if (!chosen().length) return;
    tables.forEach(function (table) { // the view that was sent
      var details = table.closest("details");
      if (details && table.tBodies[0].querySelector("tr[hidden]")) details.open = true;
    });
  }

  function sort(table, header) {
    var index = header.cellIndex, isNumber = header.classList.contains("n");
    // numbers begin with the largest, names with the first
    var first = isNumber ? "descending" : "ascending", other = isNumber ? "ascending" : "descending";
    var order = header.getAttribute("aria-sort") === first ? other : first, sign = order === "ascending" ? 1 : -1;
    var body = table.tBodies[0], rows = Array.prototype.slice.call(body.rows);
    rows = rows.map(function (row, place) {
      var text = row.cells[index].textContent;
      return { row: row, place: place, value: isNumber ? parseFloat(text) : text };
    });
    rows.sort(function (one, two) {
      var a = one.value, b = two.value;
      // what has no number stays at the end, whichever way
      if (isNumber && (isNaN(a) || isNaN(b))) return isNaN(a) - isNaN(b) || one.place - two.place;
      return a < b ? -sign : a > b ? sign : one.place - two.place;
    });
    rows.forEach(function (item) { body.appendChild(item.row); });
    headers(table).forEach(function (each) { each.removeAttribute("aria-sort"); });
    header.setAttribute("aria-sort", order);
  }

  tables.forEach(function (table) {
    headers(table).forEach(function (header) {
      var button = document.createElement("button");
      button.type = "button";
      button.textContent = header.textContent;
      button.addEventListener("click", function () { sort(table, header); });
      header.textContent = "";
      header.appendChild(button);
    });
  });
  searches.forEach(function (input) {
    input.closest(".search").hidden = false;
    input.addEventListener("input", apply);
  });
  // a link that was followed before has no new address
  Array.prototype.forEach.call(document.querySelectorAll("nav a"), function (link) {
    link.addEventListener("click", function () { visit(link.getAttribute("href").slice(1)); });
  });
  if (form) {
    form.hidden = false;
    form.addEventListener("change", function () { apply(); remember(); });
    form.addEventListener("reset", function () {
      searches.forEach(function (input) { input.value = ""; });
      setTimeout(function () { apply(); remember(); }, 0);
    });
  }
  window.addEventListener("hashchange", recall);
  apply();
  recall();
})();
